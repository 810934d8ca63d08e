"""Where the contents of evicted blocks go, and come back from: host memory, and files. By hash; knows no pool and no allocator."""
