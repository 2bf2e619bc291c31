"""What changes in a graph: recognise, bucket, reorder, and the Inductor passes that chain them."""
