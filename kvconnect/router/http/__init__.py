"""HTTP of the router: admission, client requests and replies, requests to engines."""
