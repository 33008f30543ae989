"""Writes into tests/docker/schemas.json what a CustomResourceDefinition says: the names and types of the fields around
those that the manifests under docker/kubernetes use, and no more of it.

  python3 tests/docker/derive_schema.py CRD.yaml VERSION

CRD.yaml is one of
- manifests/base/kubeflow.org_mpijobs.yaml of https://github.com/kubeflow/mpi-operator (v0.8.2)
- manifests/base/crds/trainer.kubeflow.org_{trainjobs,trainingruntimes}.yaml of https://github.com/kubeflow/trainer (v2.3.0)
at VERSION. Run it again when a manifest comes to use a field that the file leaves out; docker_test.py says so.
"""
import json
import pathlib
import sys

import yaml

HERE = pathlib.Path(__file__).resolve().parent
SCHEMAS = HERE / "schemas.json"
MANIFESTS = sorted((HERE.parents[1] / "docker/kubernetes").glob("*.yaml"))
KEPT = ("type", "enum", "required", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields")


def used_paths(value, path=()) -> set:
    """The paths of all fields of a manifest; list elements are "[]"."""
    paths = {path}
    if isinstance(value, dict):
        for key, inner in value.items():
            paths |= used_paths(inner, path + (key,))
    elif isinstance(value, list):
        for inner in value:
            paths |= used_paths(inner, path + ("[]",))
    return paths


def reduced(schema: dict, path: tuple, used: set) -> dict:
    """`schema` without prose and without what lies below fields that nothing uses."""
    kept = {key: schema[key] for key in KEPT if key in schema}
    if path not in used:
        if "properties" in schema or "items" in schema or isinstance(schema.get("additionalProperties"), dict):
            kept["left-out"] = True
        return kept
    if "properties" in schema:
        kept["properties"] = {name: reduced(inner, path + (name,), used) for name, inner in schema["properties"].items()}
    if isinstance(schema.get("additionalProperties"), dict):
        # A map: its keys are names of the manifest's own.
        values = {path + ("*",) + other[len(path) + 1:] for other in used
                  if len(other) > len(path) and other[:len(path)] == path}
        kept["additionalProperties"] = reduced(schema["additionalProperties"], path + ("*",), values)
    if "items" in schema:
        kept["items"] = reduced(schema["items"], path + ("[]",), used)
    return kept


def main() -> None:
    crd = yaml.safe_load(pathlib.Path(sys.argv[1]).read_text())
    kind = crd["spec"]["names"]["kind"]
    documents = [one for manifest in MANIFESTS for one in yaml.safe_load_all(manifest.read_text()) if one["kind"] == kind]
    used = set().union(*(used_paths(one) for one in documents))
    name = documents[0]["apiVersion"].rpartition("/")[2]
    version = next(version for version in crd["spec"]["versions"] if version["name"] == name)
    schemas = json.loads(SCHEMAS.read_text())
    schemas[kind] = {"apiVersion": documents[0]["apiVersion"], "version": sys.argv[2],
                     "schema": reduced(version["schema"]["openAPIV3Schema"], (), used)}
    # A line for each kind: people read the CustomResourceDefinition.
    SCHEMAS.write_text("{\n" + ",\n".join(f"{json.dumps(kind)}: {json.dumps(schema, separators=(',', ':'))}"
                                          for kind, schema in sorted(schemas.items())) + "\n}\n")


if __name__ == "__main__":
    main()
