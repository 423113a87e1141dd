"""When things run: Prefect flows over DVC's graph, and the command line."""
