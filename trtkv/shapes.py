"""The letters in which every docstring of this project states shapes."""

LEGEND = {
    "B": "sequences in the batch",
    "T": "new tokens of this step, all sequences concatenated",
    "S": "tokens stored for one sequence",
    "R": "rows of logits requested",
    "P": "pages in the pool",
    "M": "pages of one sequence",
    "N": "tokens in one page",
    "Y": "page groups: layers that store equally many tokens share page numbers",
    "Z": "sequence slots of the runtime",
    "L": "layers",
    "Hq": "query heads",
    "Hk": "key-value heads",
    "G": "query heads per key-value head, Hq / Hk",
    "D": "head dimension",
    "E": "hidden size",
    "F": "width of the feed-forward layer",
    "V": "vocabulary",
    "K": "selected tokens or pages",
    "U": "selectable units (tokens or pages) of one sequence",
    "W": "queries in the observation window",
}
