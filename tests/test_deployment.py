"""The image and the manifests of `deploy/kubernetes` agree with each other, with the settings and with the page."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from transfer_queue.cli import doctor
from transfer_queue.cli.doctor import machine
from transfer_queue.config.loading import unknown_keys
from transfer_queue.config.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "kubernetes"
PAGE = (ROOT / "docs" / "guides" / "kubernetes.md").read_text("utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
KUBERNETES = "1.31"  # whose schemas the manifests must match
SPARE = 4 << 30  # bytes of /dev/shm for NCCL and data loaders, as the page says

Json = dict[str, Any]


def manifest(name: str) -> Json:
    loaded: Json = yaml.safe_load((FOLDER / f"{name}.yaml").read_text("utf-8"))
    return loaded


def settings_text() -> str:
    return str(manifest("settings")["data"]["config.yaml"])


def groups() -> dict[str, Json]:
    spec = manifest("raycluster")["spec"]
    return {"head": spec["headGroupSpec"], **{each["groupName"]: each for each in spec["workerGroupSpecs"]}}


def container(group: Json) -> Json:
    (found,) = group["template"]["spec"]["containers"]
    return dict(found)


def nbytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Gi|Mi)?", quantity).groups()  # type: ignore[union-attr]
    return int(number) << {"Gi": 30, "Mi": 20, None: 0}[unit]


def shared_memory_of(group: Json) -> int:
    """The bytes of the volume that is mounted as /dev/shm."""
    (mounted,) = [each["name"] for each in container(group)["volumeMounts"] if each["mountPath"] == "/dev/shm"]
    (volume,) = [each for each in group["template"]["spec"]["volumes"] if each["name"] == mounted]
    assert volume["emptyDir"]["medium"] == "Memory"
    return nbytes(volume["emptyDir"]["sizeLimit"])


def commands(group: Json) -> list[str]:
    """The `tq` commands of the probes."""
    probes = [container(group)[f"{kind}Probe"]["exec"]["command"] for kind in ("startup", "readiness", "liveness")]
    texts = [each[2] if each[:2] == ["bash", "-c"] else " ".join(each) for each in probes]
    return [text.partition("&&")[0].strip() for text in texts]


class TestManifests:
    def test_they_match_the_schemas_of_kubernetes(self) -> None:
        names = {path.stem for path in FOLDER.glob("*.yaml")}
        assert names == {"settings", "raycluster", "network-policy"}
        for name in sorted(names - {"raycluster"}):
            kubernetes_validate.validate(manifest(name), KUBERNETES, strict=True)
        for name, group in groups().items():
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": group["template"]}
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)

    def test_the_cluster_has_the_form_of_a_ray_cluster(self) -> None:
        cluster = manifest("raycluster")
        assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
        assert set(cluster["spec"]) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
        for group in groups().values():
            assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        policy = manifest("network-policy")["spec"]["podSelector"]["matchLabels"]
        assert policy == {"ray.io/cluster": cluster["metadata"]["name"]}

    def test_the_version_of_ray_is_that_of_the_image(self) -> None:
        (pinned,) = re.findall(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
        assert manifest("raycluster")["spec"]["rayVersion"] == pinned
        assert set(re.findall(r"rayproject/ray:([\d.]+)", DOCKERFILE + PAGE)) == {pinned}


class TestSettings:
    def test_every_setting_is_known_and_allowed(self) -> None:
        conf = yaml.safe_load(settings_text())
        assert unknown_keys(conf, strict=True) == []
        Settings.from_config(conf).check_runtime(under_ray=True)

    def test_the_resources_that_the_settings_name_exist_in_one_group_each(self) -> None:
        settings = Settings.from_config(yaml.safe_load(settings_text()))
        having = {
            name: set(json.loads(group["rayStartParams"]["resources"].strip("'\"").replace('\\"', '"')))
            for name, group in groups().items()
        }
        assert having == {"head": set(settings.ray_actor_options["resources"]), "workers": {settings.ray_node_resource}}

    def test_every_pod_has_the_settings(self) -> None:
        name = manifest("settings")["metadata"]["name"]
        for group in groups().values():
            volumes = {each["name"]: each for each in group["template"]["spec"]["volumes"]}
            mounts = {each["mountPath"]: each["name"] for each in container(group)["volumeMounts"]}
            assert volumes[mounts["/etc/transfer_queue"]]["configMap"] == {"name": name}


class TestSizes:
    def test_shared_memory_holds_the_unit_and_the_object_store_and_fits_the_memory(self) -> None:
        arena = Settings.from_config(yaml.safe_load(settings_text())).arena_bytes
        assert arena is not None
        for name, group in groups().items():
            store, memory = int(group["rayStartParams"]["object-store-memory"]), container(group)["resources"]
            unit = arena if name == "workers" else 0
            assert shared_memory_of(group) >= unit + store + (SPARE if unit else 0)
            assert nbytes(memory["limits"]["memory"]) >= 2 * shared_memory_of(group)
            assert memory["requests"]["memory"] == memory["limits"]["memory"]

    @pytest.mark.parametrize(("part", "level"), [(1, "ok"), (2, "problem")])
    def test_the_startup_probe_fails_if_shared_memory_is_too_small(
        self, part: int, level: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        worker = groups()["workers"]
        size, limit = shared_memory_of(worker) // part, nbytes(container(worker)["resources"]["limits"]["memory"])
        monkeypatch.setattr(machine, "file_system_space", lambda folder: (size, size))
        monkeypatch.setattr(machine, "memory_limit", lambda: limit)
        path = tmp_path / "config.yaml"
        path.write_text(settings_text(), "utf-8")
        assert [each.level for each in machine.check_storage_settings(path)] == [level]

    def test_the_page_names_the_sizes(self) -> None:
        worker = groups()["workers"]
        rows = dict(re.findall(r"^\| [^|]+ \| (?:the )?`([\w.-]+)`[^|]* \| (\d+ GiB) \|", PAGE, re.MULTILINE))
        found = {
            "arena_bytes": Settings.from_config(yaml.safe_load(settings_text())).arena_bytes or 0,
            "object-store-memory": int(worker["rayStartParams"]["object-store-memory"]),
            "sizeLimit": shared_memory_of(worker),
            "resources.limits.memory": nbytes(container(worker)["resources"]["limits"]["memory"]),
        }
        assert rows == {name: f"{value >> 30} GiB" for name, value in found.items()}


class TestProbes:
    def test_they_are_commands_of_tq_that_start_nothing(self) -> None:
        parser = argparse.ArgumentParser()
        doctor.add(parser.add_subparsers())
        health = json.loads(re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[0])
        for words in [" ".join(health), *(each for group in groups().values() for each in commands(group))]:
            options = parser.parse_args(words.split()[1:])
            assert (words.split()[:2], options.no_test, options.json) == (["tq", "doctor"], True, True)

    def test_the_page_names_the_commands(self) -> None:
        startup, readiness, liveness = commands(groups()["workers"])
        assert readiness == liveness
        assert f"| `{startup}` |" in PAGE
        assert f"| readiness | `{readiness}`" in PAGE

    def test_liveness_waits_ten_minutes_and_readiness_one(self) -> None:
        for group in groups().values():
            seconds = {
                kind: container(group)[f"{kind}Probe"]["periodSeconds"]
                * container(group)[f"{kind}Probe"]["failureThreshold"]
                for kind in ("startup", "readiness", "liveness")
            }
            assert seconds == {"startup": 60, "readiness": 60, "liveness": 600}


def test_what_the_image_is_built_from_is_in_its_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    copied = [
        words for line in re.findall(r"^COPY (?!--)(.*)$", DOCKERFILE, re.MULTILINE) for words in line.split()[:-1]
    ]
    assert "*" in ignored
    assert sorted(f"!{name}" for name in copied) == sorted(line for line in ignored if line.startswith("!"))
    assert all((ROOT / name).exists() for name in copied)
