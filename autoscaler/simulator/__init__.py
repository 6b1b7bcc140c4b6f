"""Traffic of the past through the decisions of the present: discrete events on a clock that only the events move."""
