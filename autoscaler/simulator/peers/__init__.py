"""Other autoscalers, as policies of the simulator: what Stoker's decisions are measured against.

    kpa, knative   Knative's pod autoscaler, exactly; and what surrounds it there (activator, grace period)
    keepalive      a fixed time
    reactive       by observed load and the break-even keep-alive: what remains of Stoker without forecasts
    histogram      idle-time histograms (Serverless in the Wild, ATC 2020)
    oracle         knows the future

Each has the parameters its authors published; benchmarks tune them on learning days. Limits: all of them are given the
same machines, starts and service times, and no more of the cluster than their authors' systems see.
"""

from __future__ import annotations
