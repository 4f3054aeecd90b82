package main

import (
	"bytes"
	"regexp"
	"strings"
	"testing"

	"fairlead.dev/fairlead/docs"
)

// Each topic has all headings of its document, and none of Markdown's links and fences.
func TestTopics(t *testing.T) {
	for name, document := range map[string]string{"symptoms": docs.Symptoms, "modes": docs.Modes, "glossary": docs.Glossary} {
		var out bytes.Buffer
		c := root()
		c.SetOut(&out)
		c.SetArgs([]string{"help", name})
		if err := c.Execute(); err != nil {
			t.Fatal(err)
		}
		for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(document, -1) {
			if !strings.Contains(out.String(), strings.ToUpper(heading[1])+"\n") {
				t.Errorf("help %s lacks %q", name, heading[1])
			}
		}
		if mark := regexp.MustCompile("\\]\\(|```|digraph").FindString(out.String()); mark != "" {
			t.Errorf("help %s has %q in it:\n%s", name, mark, out.String())
		}
	}
}
