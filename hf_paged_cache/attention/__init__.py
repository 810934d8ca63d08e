"""What attention reads of the running rows: copies that grow in place, or a gather for each layer."""
