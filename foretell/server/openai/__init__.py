"""Request and response shapes of the OpenAI API."""
