"""The inputs of models: text, images, audio, token ids and embeddings, from files, arrays or made by code."""
