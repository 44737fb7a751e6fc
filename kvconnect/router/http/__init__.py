"""HTTP as the router speaks it: admission of clients, connections and requests to engines."""
