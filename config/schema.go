package config

// Schema is the JSON schema of a kind, or nil: KubeProxyConfiguration or FairleadConfiguration.
func Schema(kind string) []byte { return nil }
