"""The bounds that a mixed day is held to, in one place;
each is the value to reach, whatever today's code does.

Used by `judge` and by `tests.torture.test_mixed_days`.
"""

from __future__ import annotations

PODS_OF_A_RATE = 2000
"""The least number of pods for which a bound per thousand pods is judged.

A single race fails up to four pods, which would be ten of a thousand on a day of 400 pods.
"""

IDLE_SECONDS = 5.0
"""How long a GPU may have no holder and no claimant while a pod that it could serve waits."""

IDLE_OF_A_THOUSAND = 3.0
"""Pods that waited although a GPU that could serve them had been idle for longer.

Measured on 60 days: 12 of 24,076, on two of them. Volcano's scheduler sums up the memory of its
pods over the node. So pods that wait for a GPU which another family has take the place of pods that
a free one could serve; no agent can change that sum.
"""

REFUSED_ALTHOUGH_FREE_SECONDS = 20.0
"""The time that a bound pod may wait for its own GPU once no other family holds it: kubelet tries a
refused start again after some 14 s.
"""

ENDS_BEFORE_A_BOUND_POD = 12
"""Holders of other families that may end on a bound pod's GPUs while its start is refused.

A GPU has `plan.REPLICAS` shares of a family. They drain, and so do those of at most two families
whose pods were bound earlier.
"""

ENDS_BEFORE_A_FAMILY = 300
"""Holders of other families that may end on the node while a family waits with nobody of it placed.

Measured in 100 quiet days with 40,134 pods: 166, where the family had no pod of the day yet, so
that nothing was drained for it, and 108 elsewhere. Without drains it was 294. No agent sees pods
that no scheduler has placed. The value to reach is 120: the ten shares of each of the four GPUs,
thrice.
"""

ENDS_BEFORE_A_FAMILY_IN_TROUBLE = 400
"""The same on a troubled day: schedulers and agents are away while pods end, and an agent that is
killed forgets who has waited.

Measured in 250 troubled days with 100,259 pods and 708 kills of the agent: 314.
"""

FAILED_OF_A_THOUSAND = 3.0
"""Pods that fail because families race for a GPU, on a node on which nothing fails.

Measured on 60 days: 22 of 24,076, which is 0.9 of a thousand, and 2.5 in the worst ten days. 21 of
them were bound in the same instant as pods of another family whose ids name GPUs, when a GPU that
none had wanted in its round, or that was new, was offered to all. The other one went by what
kubelet wrote while ids were withdrawn. It was 11 of a thousand before families had turns of their
own.
"""

HANDOVER_P99_SECONDS = 2.0
"""From the end of a GPU's last holder to healthy ids of another family at kubelet."""

LISTS_OF_A_FAMILY_PER_POD_EVENT = 2.0
"""ListAndWatch messages of a resource whose ids name GPUs, for each pod that starts or ends."""
