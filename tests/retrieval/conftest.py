"""FAISS runs on one thread in these tests: graphs are reproducible, and threads do not spin on a busy machine."""

import faiss

faiss.omp_set_num_threads(1)
