"""Answer requests (`backend.Backend`): engines here (`engine.LocalEngine`), and servers elsewhere."""
