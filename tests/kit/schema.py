"""A check of values against a JSON schema, of the words that padiff's schema uses."""

from __future__ import annotations


def violations(value, schema, root):
    """Where a value breaks a JSON schema, of the words that padiff's schema uses."""
    if "$ref" in schema:
        return violations(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        found = [violations(value, each, root) for each in schema["anyOf"]]
        return [] if [] in found else found[0]
    if "enum" in schema:
        return [] if value in schema["enum"] else [value]
    kinds = {"integer": int, "number": (int, float), "string": str, "boolean": bool, "null": type(None), "array": list}
    if schema["type"] == "object":
        if (
            not isinstance(value, dict)
            or set(value) != set(schema["required"])
            or set(value) != {*schema["properties"]}
        ):
            return [value]
        return [bad for key, each in value.items() for bad in violations(each, schema["properties"][key], root)]
    if not isinstance(value, kinds[schema["type"]]):
        return [value]
    return [bad for each in value for bad in violations(each, schema["items"], root)] if "items" in schema else []
