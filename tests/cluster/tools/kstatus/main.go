// Reads JSON objects from standard input, one after the other, and prints what kstatus says of each: status, a tab, its message.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
)

func main() {
	decoder := json.NewDecoder(os.Stdin)
	for {
		object := &unstructured.Unstructured{}
		if err := decoder.Decode(&object.Object); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			fail(err)
		}
		// Numbers of decoded JSON are float64, and kstatus asks for int64.
		text, err := json.Marshal(object.Object)
		if err != nil {
			fail(err)
		}
		if err := object.UnmarshalJSON(text); err != nil {
			fail(err)
		}
		result, err := status.Compute(object)
		if err != nil {
			fail(err)
		}
		fmt.Printf("%s\t%s\n", result.Status, result.Message)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
