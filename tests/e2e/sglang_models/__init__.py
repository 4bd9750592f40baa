"""Models in the place of SGLang's: for ``SGLANG_EXTERNAL_MODEL_PACKAGE``."""
