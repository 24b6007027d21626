"""External engines that hold an index instead of FAISS shards: `store` is the interface, `milvus` the first engine, `engines` connects."""
