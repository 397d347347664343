"""Put kept kernels back into a model: the Dynamo backend, the artifact, whole-model measurement."""
