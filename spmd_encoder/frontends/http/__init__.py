"""The HTTP front end: `app.create_app` answers requests, `server.HttpFrontEnd` listens."""
