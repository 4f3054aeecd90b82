package monitoring
import (
 _ "github.com/prometheus/prometheus/promql/parser"
 _ "github.com/prometheus/prometheus/model/rulefmt"
 _ "fairlead.dev/fairlead/metrics"
 "testing"
)
func TestX(*testing.T){}
