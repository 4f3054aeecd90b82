package file

import "testing"

func TestLine(t *testing.T) {
	const text = `# a comment
apiVersion: v1
metadata:
  annotations:
    a.b/c: d
    "e": "f"
spec:
  on: off
  selector:
    app: web
  ports:
  - name: http
    port: 80
  - {name: https,
     port: 443, empty: }
`
	for path, want := range map[string]int{
		"": 2, "apiVersion": 2, "metadata.annotations[a.b/c]": 5, "metadata.annotations[e]": 6, "spec.selector": 9,
		"spec.selector.app": 10, "spec.ports": 11, "spec.ports[0]": 12, "spec.ports[0].port": 13, "spec.ports[1].port": 15,
		"spec.ports[1].empty": 15, "spec.ports[1].none": 14, "spec.ports[7].none": 11, "spec.none": 7, "spec.true": 8,
	} {
		if _, got, _ := find(tree([]byte(text)), steps(path)); got != want {
			t.Errorf("%s is on line %d, want %d", path, got, want)
		}
	}
	const item = "- kind: Service\n  spec:\n    port: 1\n"
	if _, got, _ := find(tree([]byte(item)), steps("spec.port")); got != 3 {
		t.Errorf("in an item of a List: line %d", got)
	}
	if _, got, _ := find(tree([]byte("{\n\t\"kind\": \"Service\",\n\t\"spec\": {\n\t\t\"port\": 1}}")), steps("spec.port")); got != 4 {
		t.Errorf("in JSON: line %d", got)
	}
}
