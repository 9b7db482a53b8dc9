"""The law that policies cannot change tokens, held against one workload: `paxserve verify`."""
