"""What the connector of any engine needs. Imports no engine."""
