"""Files that exporters write, trained beside PEFT (make exporters)."""
