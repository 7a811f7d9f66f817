"""The master's gRPC server: its services, who may call them, and how calls become events."""
