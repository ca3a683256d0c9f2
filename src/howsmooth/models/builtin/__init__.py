"""Two small trained models that ship with the library, each in a folder of the Hugging Face format."""
