package file

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/service"
)

// pods are a Deployment and a Pod.
const pods = `apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web, tier: front}}
    spec: {containers: [{name: c, ports: [{name: http, containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: db-0, namespace: shop, labels: {app: db}}
spec: {containers: [{name: c}]}
`

func selecting(spec string) string {
	return "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec:\n  clusterIP: 10.96.0.10\n" + spec
}

// mistakes are manifests that are valid, or nearly so, and what is said of them with the line: by the agent, and where
// pods become endpoints.
var mistakes = map[string]struct {
	text       string
	run, check []string
}{
	"no endpoints": {web,
		[]string{"1: Service default/web: has no endpoints; connections are refused"},
		[]string{"1: Service default/web: has no endpoints; connections are refused"}},
	"endpoints": {web + "---\n" + webSlice, nil, nil},
	"no clusterIP": {strings.Replace(web, "clusterIP: 10.96.0.10, ", "", 1) + "---\n" + webSlice,
		[]string{"4: Service default/web: spec.clusterIP: is missing, and no API server gives it one; the Service is not served"}, nil},
	"pods": {selecting("  selector: {app: web}\n  ports:\n  - {port: 80, targetPort: http}\n---\n") + pods,
		[]string{"1: Service default/web: no EndpointSlice of the manifests has endpoints for it, " +
			"and fairlead run makes none of pods; connections are refused"}, nil},
	"selector": {selecting("  selector:\n    tier: front\n    app: wbe\n  ports: [{port: 80, targetPort: 8080}]\n---\n") + pods,
		[]string{"6: Service default/web: spec.selector: app=wbe,tier=front selects no pod of namespace default in the manifests; " +
			`connections are refused; did you mean "app=web"?`},
		[]string{"6: Service default/web: spec.selector: app=wbe,tier=front selects no pod of namespace default in the manifests; " +
			`connections are refused; did you mean "app=web"?`}},
	"selector with endpoints": {selecting("  selector: {app: wbe}\n  ports: [{port: 80}]\n---\n") + webSlice, nil, nil},
	"target port": {selecting("  selector: {app: web}\n  ports:\n  - port: 80\n    targetPort: htpp\n---\n") + webSlice + "---\n" + pods,
		[]string{"9: Service default/web: spec.ports[0].targetPort: htpp/tcp is a port of no container that the Service selects; these have http/tcp"},
		[]string{"9: Service default/web: spec.ports[0].targetPort: htpp/tcp is a port of no container that the Service selects; these have http/tcp"}},
	"target number": {selecting("  selector: {app: web}\n  ports: [{port: 80}]\n---\n") + webSlice + "---\n" + pods,
		[]string{"7: Service default/web: spec.ports[0].targetPort: 80/tcp is a port of no container that the Service selects; these have 8080/tcp"},
		[]string{"7: Service default/web: spec.ports[0].targetPort: 80/tcp is a port of no container that the Service selects; these have 8080/tcp"}},
	"port names": {strings.Replace(web, "port: 80", "name: http, port: 80", 1) + "---\n" + webSlice,
		[]string{`4: Service default/web: spec.ports[0].name: its EndpointSlices have no port "http" for tcp, only "" for tcp; connections are refused`},
		[]string{`4: Service default/web: spec.ports[0].name: its EndpointSlices have no port "http" for tcp, only "" for tcp; connections are refused`}},
	"field": {selecting("  ports:\n  - port: 80\n    tragetPort: 8080\n---\n") + webSlice,
		[]string{`8: Service default/web: spec.ports[0].tragetPort: there is no such field; it is ignored; did you mean "targetPort"?`},
		[]string{`8: Service default/web: spec.ports[0].tragetPort: there is no such field; it is ignored; did you mean "targetPort"?`}},
	"enum": {strings.Replace(web, "{clusterIP", "{internalTrafficPolicy: local, type: clusterIP, clusterIP", 1) + "---\n" + webSlice,
		[]string{`4: Service default/web: spec.internalTrafficPolicy: "local" is neither Cluster nor Local; Cluster is assumed`,
			`4: Service default/web: spec.type: "clusterIP" is none of ClusterIP, NodePort, LoadBalancer and ExternalName; ClusterIP is assumed`},
		[]string{`4: Service default/web: spec.internalTrafficPolicy: "local" is neither Cluster nor Local; Cluster is assumed`,
			`4: Service default/web: spec.type: "clusterIP" is none of ClusterIP, NodePort, LoadBalancer and ExternalName; ClusterIP is assumed`}},
	"truth": {web + "---\n" + webSlice + "---\napiVersion: v1\nkind: Service\nmetadata:\n  name: b\n  labels:\n    debug: on\n",
		[]string{`18: Service default/b: metadata.labels.debug: on is read as a truth value, not as text; write "on" with its quotes; it is left out`},
		[]string{`18: Service default/b: metadata.labels.debug: on is read as a truth value, not as text; write "on" with its quotes; it is left out`}},
	"truth as key": {selecting("  ports: [{port: 80}]\n  selector:\n    on: x\n---\n") + webSlice,
		[]string{`8: Service default/web: spec.selector.true: the key on is read as a truth value; write "on" with its quotes`},
		[]string{`8: Service default/web: spec.selector.true: the key on is read as a truth value; write "on" with its quotes`}},
	"kind": {web + "---\n" + webSlice + "---\n" + strings.Replace(db, "Service", "Servcie", 1),
		[]string{`14: Servcie shop/db: kind: "Servcie" is left out; did you mean "Service"?`},
		[]string{`14: Servcie shop/db: kind: "Servcie" is left out; did you mean "Service"?`}},
	"version": {web + "---\n" + strings.Replace(webSlice, "discovery.k8s.io/v1", "v1", 1),
		[]string{"1: Service default/web: has no endpoints; connections are refused",
			`6: EndpointSlice default/web-1: apiVersion: "v1" is not discovery.k8s.io/v1; the object is left out`}, nil},
	"other kind": {web + "---\n" + webSlice + "---\n" + strings.Replace(db, "v1", "serving.knative.dev/v1", 1), nil, nil},
	"list": {list(2, web, webSlice, strings.Replace(db, "ports", "potrs", 1)),
		[]string{"13: Service shop/db: has no endpoints; connections are refused",
			`16: Service shop/db: spec.potrs: there is no such field; it is ignored; did you mean "ports"?`}, nil},
	"json": {`{"kind":"List","apiVersion":"v1","items":[` + "\n" + `{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},` + "\n" +
		`"spec":{"clusterIP":"10.96.0.10",` + "\n" + `"prots":[]}}]}`,
		[]string{"2: Service default/web: has no endpoints; connections are refused",
			`4: Service default/web: spec.prots: there is no such field; it is ignored; did you mean "ports"?`}, nil},
}

func TestFile_warnings(t *testing.T) {
	for name, c := range mistakes {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, map[string]string{"a.yaml": c.text}).start()
			batch, err := b.Next(t.Context())
			b.must(err)
			expectProblems(t, b.dir+string(filepath.Separator), batch.Problems, c.run)
			if c.check == nil && c.run != nil && name != "no clusterIP" && name != "pods" {
				return
			}
			problems, err := Check(t.Context(), []Manifest{{"a.yaml", []byte(c.text)}})
			b.must(err)
			expectProblems(t, "", problems, c.check)
		})
	}
}

func expectProblems(t *testing.T, dir string, problems []service.Problem, want []string) {
	t.Helper()
	var got []string
	for _, p := range problems {
		got = append(got, strings.ReplaceAll(strings.TrimPrefix(p.Error(), dir+"a.yaml:"), dir, ""))
	}
	if slices.Sort(got); !slices.Equal(got, want) {
		t.Errorf("got\n\t%s\nwant\n\t%s", strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
}

// Warnings follow the files: endpoints end one, and without them it is there again. One that stands is said again
// after its Service has changed, and not because it is on another line.
func TestFile_warningsFollow(t *testing.T) {
	b := newBench(t, map[string]string{"a.yaml": web, "b.yaml": db + "---\n" + strings.ReplaceAll(webSlice, "web", "db")}).start()
	next := func(want ...string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 20e9)
		defer cancel()
		batch, err := b.Next(ctx)
		b.must(err)
		var got []string
		for _, p := range batch.Problems {
			got = append(got, strings.TrimPrefix(p.File, b.dir+string(filepath.Separator))+" "+p.Object)
		}
		if got = append(got, batch.Resolved...); !slices.Equal(got, want) {
			t.Fatalf("got %q, want %q", got, want)
		}
	}
	next("a.yaml:1 Service default/web", "b.yaml:1 Service shop/db")
	b.write("c.yaml", webSlice)
	next("Service default/web")
	b.write("c.yaml", "# none\n")
	next("a.yaml:1 Service default/web")
	b.write("a.yaml", "# moved\n"+web)
	b.expectNothing()
	b.write("a.yaml", "# moved\n"+strings.Replace(web, "0.10", "0.12", 1))
	next("a.yaml:2 Service default/web")
}
