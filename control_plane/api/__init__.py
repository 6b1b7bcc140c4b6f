"""HTTP handlers over the stores: functions, keys, usage and costs, and the middleware that maps errors."""
