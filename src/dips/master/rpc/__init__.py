"""The master's gRPC server: its services, the authorisation of calls, and the conversion of calls into events."""
