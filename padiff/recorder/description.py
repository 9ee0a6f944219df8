"""The description of a run (`RunInfo`), updated while the model and the settings change."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from padiff.frameworks.base import Framework
from padiff.model.selection import Node
from padiff.recorder.detail import Detail
from padiff.recorder.environment_fingerprint import fingerprint
from padiff.recorder.layers import Layers
from padiff.recorder.options import Identity
from padiff.recorder.processes import own_place
from padiff.recorder.schedule import Schedule
from padiff.records import ROOT, RunInfo
from padiff.system.construction import Built, construction_lines, package_of, source_digests, users_sources
from padiff.system.data_lines import data_lines, used_lines
from padiff.system.frames import Frame
from padiff.system.variables import names_of


class Description:
    """The current `RunInfo` of a recording.

    Attributes:
        info: the current description.
        rank: rank of this process.
    """

    def __init__(
        self,
        framework: Framework,
        layers: Layers,
        schedule: Schedule,
        detail: Detail,
        identity: Identity,
        replay_of: str | None = None,
    ) -> None:
        self.rank, world_size = own_place(framework, identity)
        self._layers = layers
        self._autocast_known = False
        self.info = RunInfo(
            framework=framework.name,
            framework_version=framework.version,
            layers=layers.described(),
            name=identity.name,
            world_size=world_size,
            layer_map=layers.mapped,
            recording={
                "every_n_steps": schedule.described(),
                "layers": len(layers.chosen),
                **({"list": layers.listed} if layers.listed else {}),
                **detail.described(),
                **({"command": identity.command} if identity.command else {}),
                **({"replay_of": replay_of} if replay_of else {}),
            },
            environment=fingerprint(framework, layers.nodes),
        )

    def with_autocast(self, autocast: Mapping[str, Any]) -> bool:
        """Set the autocast state from the first recorded call; return True if the description has changed.

        Autocast is active inside of the loop only, so the state is not known before that call.
        """
        if self._autocast_known or not autocast:
            return False
        self._autocast_known = True
        environment = self.info.environment
        if all(environment.get(name) == value for name, value in autocast.items()):
            return False
        self.info = replace(self.info, environment={**environment, **autocast})
        return True

    def with_errors(self, lines: Sequence[str]) -> bool:
        """Set the sentences on internal errors of padiff; return True if the description has changed."""
        if list(lines) == self.info.recording.get("errors", []):
            return False
        self.info = replace(self.info, recording={**self.info.recording, "errors": list(lines)})
        return True

    def with_schedule(self, schedule: Schedule) -> None:
        """Set the schedule of recorded steps."""
        recording = {**self.info.recording, "every_n_steps": schedule.described()}
        self.info = replace(self.info, recording=recording)

    def with_settings(self, settings: Mapping[str, Any]) -> bool:
        """Set the settings of the training; return True if the description has changed."""
        if settings == self.info.settings:
            return False
        self.info = replace(self.info, settings=dict(settings))
        return True

    def with_lines(self, optimizers: Mapping[str, Any]) -> bool:
        """Set the lines of the user's code; return True if the description has changed.

        The lines are those that construct the layers and the optimizers, make the calls of the training, and give its
        batches.

        Args:
            optimizers: the optimizers, by key.
        """
        lines: dict[str, Frame] = {}
        files: dict[str, str] = {}
        with contextlib.suppress(Exception):  # source code of any kind: a recording does without
            root, *inner = self._layers.nodes
            built = [_built(node) for node in (root, *inner)]
            names = names_of({**optimizers, ROOT: root.layer})
            kinds = {key: type(each) for key, each in optimizers.items()}
            lines = construction_lines(built, kinds, names)
            children = {node.path for node in inner if "." not in node.path}
            sources = users_sources(built)
            if "@scheduler" in lines:
                lines = used_lines(sources, lines["@scheduler"], "@schedule") | lines
            lines = data_lines(sources, names.get(ROOT, set()) | children) | lines
            files = source_digests(lines)
        if not lines:
            return False
        self.info = replace(self.info, lines=lines, files=files)
        return True

    def with_layers(self) -> None:
        """Update the description to the current layers."""
        layers = self._layers
        recording = {**self.info.recording, "layers": len(layers.chosen)}
        self.info = replace(self.info, layers=layers.described(), layer_map=layers.mapped, recording=recording)


def _built(node: Node) -> Built:
    kind = type(node.layer)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    names = tuple(base.__name__ for base in kind.__mro__)
    return Built(node.path, kind.__name__, package_of(kind), file if isinstance(file, str) else "", names)
