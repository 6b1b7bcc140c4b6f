"""Forecasters: each a pure function of a function's history. Which of them acts is `autoscaler.choosing`'s to say."""
