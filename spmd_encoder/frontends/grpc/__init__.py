"""The gRPC front end: `calls.Calls` answers calls, `server.GrpcFrontEnd` listens. Needs the extra `[grpc]`."""
