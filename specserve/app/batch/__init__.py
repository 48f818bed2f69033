"""A file of requests through one server: ``inputs`` reads them, ``journal`` keeps what came back,
``pace`` finds how many at a time, ``run`` holds it together."""
