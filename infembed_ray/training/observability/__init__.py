"""What a training reports: metrics, events, anomalies, trackers and the HTML report."""
