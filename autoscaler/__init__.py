"""Pure decisions about scale and placement. No I/O, no clock, no random source: all of them are arguments."""
