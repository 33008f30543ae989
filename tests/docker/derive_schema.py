"""Makes tests/docker/mpijob_schema.json from the MPI Operator's CustomResourceDefinition: the names and types of the
fields around those that the manifests under docker/kubernetes use, and no more of it.

  python3 tests/docker/derive_schema.py CRD.yaml VERSION

CRD.yaml is manifests/base/kubeflow.org_mpijobs.yaml of https://github.com/kubeflow/mpi-operator at VERSION (v0.8.2).
Run it again when a manifest comes to use a field that the file leaves out; docker_test.py says so.
"""
import json
import pathlib
import sys

import yaml

HERE = pathlib.Path(__file__).resolve().parent
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
    version = next(version for version in crd["spec"]["versions"] if version["name"] == "v2beta1")
    used = set().union(*(used_paths(yaml.safe_load(manifest.read_text())) for manifest in MANIFESTS))
    schema = {"source": "https://github.com/kubeflow/mpi-operator manifests/base/kubeflow.org_mpijobs.yaml",
              "version": sys.argv[2], "made by": "tests/docker/derive_schema.py",
              "schema": reduced(version["schema"]["openAPIV3Schema"], (), used)}
    (HERE / "mpijob_schema.json").write_text(json.dumps(schema, indent=1) + "\n")


if __name__ == "__main__":
    main()
