"""Sources: what the user named, kept in plans so that they can be looked at again."""

from __future__ import annotations

from dataclasses import dataclass

from wavetrain.cluster import Cluster, load_cluster
from wavetrain.workload import Workload, load_workload


@dataclass(frozen=True, kw_only=True)
class Sources:
    """A model and a cluster by the names or paths that were given."""

    model: str
    cluster: str
    seq: int | None = None
    precision: str | None = None

    def workload(self) -> Workload:
        """The model's layers."""
        return load_workload(self.model, seq=self.seq, precision=self.precision)

    def nodes(self) -> Cluster:
        """The cluster."""
        return load_cluster(self.cluster)
