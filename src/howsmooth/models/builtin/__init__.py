"""The two small trained models that ship with the library, each as a folder in the Hugging Face format."""
