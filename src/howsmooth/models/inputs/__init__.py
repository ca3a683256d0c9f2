"""Read the inputs of models (images, audio, token ids, embeddings) from files or arrays, and check them."""
