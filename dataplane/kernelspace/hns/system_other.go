//go:build !windows

package hns

import "errors"

// System is the service of this node.
func System() (HNS, error) { return nil, errors.New("HNS is a part of Windows") }
