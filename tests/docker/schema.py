"""Checks a value against a schema of tests/docker/schemas.json, as strictly as `kubectl apply` does: a field that
the schema does not have is an error."""

_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}


def problems(value, schema: dict, where: str = "") -> list:
    where = where or "it"
    if schema.get("left-out"):
        return [f"{where}: the schema leaves this out → tests/docker/derive_schema.py"]
    if schema.get("x-kubernetes-int-or-string"):
        ok = isinstance(value, (int, str)) and not isinstance(value, bool)
        return [] if ok else [f"{where}: {value!r} is neither a number nor text"]
    kind = schema.get("type")
    if kind and (not isinstance(value, _TYPES[kind]) or (kind in ("integer", "number") and isinstance(value, bool))):
        return [f"{where}: {value!r} is no {kind}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: {value!r} is none of {', '.join(schema['enum'])}"]
    found = []
    if isinstance(value, dict):
        found += [f"{where}: lacks {name}" for name in schema.get("required", []) if name not in value]
        fields, others = schema.get("properties"), schema.get("additionalProperties")
        for name, inner in value.items():
            if fields is not None and name in fields:
                found += problems(inner, fields[name], f"{where}.{name}")
            elif others is not None:
                found += problems(inner, others, f"{where}.{name}")
            elif fields is not None:
                found.append(f"{where}: there is no field {name}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            found += problems(inner, schema.get("items", {}), f"{where}[{i}]")
    return found
