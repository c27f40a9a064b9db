"""Sources: what the user named, kept in plans so that they can be looked at again."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from wavetrain.cluster import Cluster, load_cluster
from wavetrain.workload import Workload, load_workload


@dataclass(frozen=True, kw_only=True)
class Sources:
    """A model and a cluster by the names or paths that were given."""

    model: str
    cluster: str
    seq: int | None = None
    precision: str | None = None
    runtime: str = "wavetrain"
    """Who is to run the plan: wavetrain, or megatron."""

    @property
    def overlaps(self) -> bool:
        """Whether the runtime hides messages behind computing."""
        return self.runtime == "wavetrain"

    def beside(self, folder: str | os.PathLike[str]) -> Sources:
        """The same with files as they are found from ``folder``."""
        return replace(self, model=_from(self.model, folder), cluster=_from(self.cluster, folder))

    def found_from(self, folder: str | os.PathLike[str]) -> Sources:
        """The same with files, named as from ``folder``, as they are found from here."""

        def here(name: str) -> str:
            path = os.path.join(folder, name)
            return path if _is_file(name) and os.path.exists(path) else name

        return replace(self, model=here(self.model), cluster=here(self.cluster))

    def workload(self) -> Workload:
        """The model's layers."""
        return load_workload(self.model, seq=self.seq, precision=self.precision)

    def for_devices(self, cluster: Cluster) -> Sources:
        """In fp16 instead of bf16, where no precision was asked for and a device of the cluster has no bf16."""
        if self.precision is not None or not without_bfloat16(cluster) or self.workload().element_bytes != 2:
            return self
        return replace(self, precision="fp16")

    def nodes(self) -> Cluster:
        """The cluster."""
        return load_cluster(self.cluster)


def without_bfloat16(cluster: Cluster) -> list[str]:
    """Names of the devices of a cluster that do not compute in bf16."""
    return sorted({g.device.name for g in cluster.groups if not g.device.has_bfloat16})


def _is_file(name: str) -> bool:
    return name.endswith((".toml", ".json")) or os.sep in name


def _from(name: str, folder: str | os.PathLike[str]) -> str:
    if not _is_file(name) or not os.path.exists(name) or os.path.isabs(name):
        return name
    return os.path.relpath(name, folder)
