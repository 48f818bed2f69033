"""Health from progress, acceptance over time, and the exporter that publishes both."""
