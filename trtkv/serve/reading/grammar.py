"""What answers must look like that call tools, and formats of answers that reason first."""

from __future__ import annotations

import json
from typing import Any

from trtkv.errors import RequestError
from trtkv.runtime.grammar import Grammar
from trtkv.serve.reading.calls import CallFormat
from trtkv.serve.schema import ChatRequest
from trtkv.serve.schema_tools import Function, NamedTool


def grammar_of_calls(form: CallFormat, body: ChatRequest, closer: str) -> Grammar | None:
    """Return what a forced call, or calls of strict functions, must look like; None where neither is requested.

    closer ends the reasoning in which the answer begins; empty if it does not. A forced answer that does not begin there is calls alone.
    """
    choice, functions = body.tool_choice, [one.function for one in body.tools or ()]
    if isinstance(choice, NamedTool):
        functions = [one for one in functions if one.name == choice.function.name]
    forced = choice == "required" or isinstance(choice, NamedTool)
    if not forced and not any(one.strict for one in functions):
        return None
    single = body.parallel_tool_calls is False or isinstance(choice, NamedTool)
    tags = [_tag(form, one, forced=forced) for one in functions]
    triggers = [form.opener if tags[0]["begin"].startswith(form.opener) else form.written[0].partition("{name}")[0].format()]
    if forced and closer:
        opening = [{**one, "begin": f"{closer}\n\n{one['begin']}"} for one in tags]
        return _tags([closer, *([] if single else triggers)], opening + ([] if single else tags), single=single)
    return _tags(triggers, tags, forced=forced, single=single)


def after_reasoning(grammar: Grammar, closer: str) -> Grammar:
    """Return a grammar for an answer that begins in its reasoning, which closer ends; raises RequestError for a language that cannot follow it."""
    if grammar.kind not in ("json_schema", "json_object"):
        raise RequestError(f"a format of kind '{grammar.kind}' does not go with reasoning", "Use a JSON schema, or turn the reasoning off.")
    schema = json.loads(grammar.text) if grammar.kind == "json_schema" else {"type": "object"}
    return _tags([closer], [{"begin": f"{closer}\n\n", "schema": schema, "end": ""}], single=True)


def _tag(form: CallFormat, function: Function, *, forced: bool) -> dict[str, Any]:
    begin, end = form.written
    schema = function.schema_of_arguments if forced or function.strict else {"type": "object"}
    return {"begin": begin.format(name=function.name), "schema": schema, "end": end}


def _tags(triggers: list[str], tags: list[dict[str, Any]], *, forced: bool = False, single: bool = False) -> Grammar:
    return Grammar("structural_tag", json.dumps({"triggers": triggers, "structures": tags, "at_least_one": forced, "stop_after_first": single}))
