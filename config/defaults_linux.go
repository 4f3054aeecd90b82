package config

func defaultControlSocket() string { return "/run/fairlead/fairlead.sock" }
