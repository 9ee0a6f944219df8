"""The page that shows a report: JavaScript, CSS, the HTML writer, and the TensorBoard plugin.

It reads the JSON that a comparison writes, and nothing else of padiff.
"""

from padiff_page.html import page

__all__ = ["page"]
