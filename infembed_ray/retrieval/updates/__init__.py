"""Live updates of an index: write-ahead log, live shards and compaction."""
