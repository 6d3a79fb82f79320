"""Looking into engines: inspect, verify, doctor."""
