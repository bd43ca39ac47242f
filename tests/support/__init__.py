"""What tests share: gateways, engines, plugins, loads and files to test with."""
