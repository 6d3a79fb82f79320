def policy_presets():
    import tomllib, pathlib
    return tomllib.loads((pathlib.Path(__file__).parent/'policies.toml').read_text())
