"""SGLang's encoder protocol without its transport: parts of requests, and the receivers that register for them."""
