"""The words of the phrasebook, written by hand; `words.py` reads these tables and inflects what they leave out.

    nouns        English [plural] | article, German, genitive, plural | what it is; of:X says what it may belong to
    verbs        English [past participle] | German infinitive, he-form, past, (ist) participle | subject > complements
    adjectives   English [comparative] [adverb] | German, comparative [stem-] | what it is said of

A German ending begins with a hyphen and is put after the noun; a lone hyphen adds nothing; a plural of "." means that
there is none. Every English word stands for one German word and the other way round, and no form belongs to two
words: so either side of a pair tells which words were drawn, which is what the splits are made from.
"""

from __future__ import annotations

PEOPLE = """
man men       | der Mann -es Männer        | person adult
woman women   | die Frau - -en             | person adult
child children| das Kind -es -er           | person kin young of:adult
girl          | das Mädchen -s -           | person young
boy           | der Junge -n -n            | person young
father        | der Vater -s Väter         | person adult kin family of:person
mother        | die Mutter - Mütter        | person adult kin family of:person
brother       | der Bruder -s Brüder       | person kin family of:person
sister        | die Schwester - -n         | person kin family of:person
son           | der Sohn -es Söhne         | person kin family young of:adult
daughter      | die Tochter - Töchter      | person kin family young of:adult
uncle         | der Onkel -s -             | person adult kin family of:person
aunt          | die Tante - -n             | person adult kin family of:person
grandmother   | die Großmutter - Großmütter| person adult kin family of:person
grandfather   | der Großvater -s Großväter | person adult kin family of:person
friend        | der Freund -es -e          | person kin of:person
neighbour     | der Nachbar -n -n          | person adult kin of:person
teacher       | der Lehrer -s -            | person adult kin of:young
doctor        | der Arzt -es Ärzte         | person adult kin of:person
student       | der Student -en -en        | person adult
writer        | der Autor -s -en           | person adult of:text
owner         | der Besitzer -s -          | person adult of:building vehicle animal
painter       | der Maler -s -             | person adult of:picture
farmer        | der Bauer -n -n            | person adult
baker         | der Bäcker -s -            | person adult
judge         | der Richter -s -           | person adult
singer        | der Sänger -s -            | person adult
gardener      | der Gärtner -s -           | person adult
soldier       | der Soldat -en -en         | person adult
king          | der König -s -e            | person adult
queen         | die Königin - -nen         | person adult
prince        | der Prinz -en -en          | person adult
princess      | die Prinzessin - -nen      | person adult
guest         | der Gast -es Gäste         | person adult kin of:adult
tourist       | der Tourist -en -en        | person adult
colleague     | der Kollege -n -n          | person adult kin of:adult
customer      | der Kunde -n -n            | person adult
thief thieves | der Dieb -es -e            | person adult
captain       | der Kapitän -s -e          | person adult of:ship
pilot         | der Pilot -en -en          | person adult
lawyer        | der Anwalt -s Anwälte      | person adult
witness       | der Zeuge -n -n            | person adult
nurse         | die Krankenschwester - -n  | person adult
"""

ANIMALS = """
dog           | der Hund -es -e            | animal pet barker
cat           | die Katze - -n             | animal pet
horse         | das Pferd -es -e           | animal mount
bird          | der Vogel -s Vögel         | animal flier
cow           | die Kuh - Kühe             | animal
mouse mice    | die Maus - Mäuse           | animal
rabbit        | das Kaninchen -s -         | animal pet
bear          | der Bär -en -en            | animal wild
duck          | die Ente - -n              | animal flier
goat          | die Ziege - -n             | animal
pig           | das Schwein -s -e          | animal
lion          | der Löwe -n -n             | animal wild
fox           | der Fuchs -es Füchse       | animal wild
snake         | die Schlange - -n          | animal wild
elephant      | der Elefant -en -en        | animal mount
donkey        | der Esel -s -              | animal mount
frog          | der Frosch -es Frösche     | animal
chicken       | das Huhn -s Hühner         | animal
"""

PLACES = """
house         | das Haus -es Häuser        | building in
school        | die Schule - -n            | building in
church        | die Kirche - -n            | building in
hotel         | das Hotel -s -s            | building in
restaurant    | das Restaurant -s -s       | building in
museum        | das Museum -s Museen       | building in
hospital      | das Krankenhaus -es Krankenhäuser | building in
library       | die Bibliothek - -en       | building in
castle        | die Burg - -en             | building in
factory       | die Fabrik - -en           | building in
office        | das Büro -s -s             | room in
theatre       | das Theater -s -           | building in
kitchen       | die Küche - -n             | room in of:building
room          | das Zimmer -s -            | room in of:kin
garden        | der Garten -s Gärten       | open in of:kin
park          | der Park -s -s             | open in
forest        | der Wald -es Wälder        | open in
city          | die Stadt - Städte         | town in
village       | das Dorf -es Dörfer        | town in
valley        | das Tal -es Täler          | open in
street        | die Straße - -n            | open on
bridge        | die Brücke - -n            | open on
mountain      | der Berg -es -e            | open on peak
island        | die Insel - -n             | open on
station       | der Bahnhof -s Bahnhöfe    | building at
lake          | der See -s -n              | open at
river         | der Fluss -es Flüsse       | open at
"""

TEXTS = """
book          | das Buch -es Bücher        | text goods prose
letter        | der Brief -es -e           | text prose
newspaper     | die Zeitung - -en          | text goods
novel         | der Roman -s -e            | text goods prose
poem          | das Gedicht -s -e          | text prose
story         | die Geschichte - -n        | text tale prose
report        | der Bericht -s -e          | text prose
article       | der Artikel -s -           | text prose
message       | die Nachricht - -en        | text prose
"""

VEHICLES = """
car           | das Auto -s -s             | vehicle goods road
train         | der Zug -es Züge           | vehicle public
bus           | der Bus Busses Busse       | vehicle public road
bicycle       | das Fahrrad -s Fahrräder   | vehicle goods
ship          | das Schiff -s -e           | vehicle ship public
boat          | das Boot -s -e             | vehicle ship
plane         | das Flugzeug -s -e         | vehicle public flier
tractor       | der Traktor -s -en         | vehicle road
"""

THINGS = """
table         | der Tisch -es -e           | thing goods furniture
chair         | der Stuhl -s Stühle        | thing goods furniture seat
bed           | das Bett -es -en           | thing goods furniture seat
sofa          | das Sofa -s -s             | thing goods furniture seat
bench         | die Bank - Bänke           | thing furniture seat
cupboard      | der Schrank -s Schränke    | thing goods furniture opening
lamp          | die Lampe - -n             | thing goods small device glowing
door          | die Tür - -en              | thing opening of:building room
window        | das Fenster -s -           | thing opening of:building room vehicle
roof          | das Dach -es Dächer        | thing of:building
wall          | die Wand - Wände           | thing of:building room
key           | der Schlüssel -s -         | thing small portable of:building
clock         | die Uhr - -en              | thing goods small ringing
cup           | die Tasse - -n             | thing goods small portable fragile
glass         | das Glas -es Gläser        | thing goods small portable fragile
plate         | der Teller -s -            | thing goods small portable fragile
bottle        | die Flasche - -n           | thing goods small portable fragile
knife knives  | das Messer -s -            | thing goods small portable
spoon         | der Löffel -s -            | thing goods small portable
fork          | die Gabel - -n             | thing goods small portable
bag           | die Tasche - -n            | thing goods small portable of:person
suitcase      | der Koffer -s -            | thing goods small portable of:adult
box           | die Kiste - -n             | thing goods small portable
basket        | der Korb -es Körbe         | thing goods small portable
picture       | das Bild -es -er           | thing goods small portable picture of:person animal
mirror        | der Spiegel -s -           | thing goods fragile
carpet        | der Teppich -s -e          | thing goods
ball          | der Ball -es Bälle         | thing goods small portable toy
doll          | die Puppe - -n             | thing goods small portable toy
gift          | das Geschenk -s -e         | thing small portable
coin          | die Münze - -n             | thing small portable
camera        | die Kamera - -s            | thing goods small portable device
computer      | der Computer -s -          | thing goods device
radio         | das Radio -s -s            | thing goods device
television    | der Fernseher -s -         | thing goods device
telephone     | das Telefon -s -e          | thing goods small ringing
machine       | die Maschine - -n          | thing device of:person
umbrella      | der Regenschirm -s -e      | thing goods small portable
candle        | die Kerze - -n             | thing goods small portable glowing burning
guitar        | die Gitarre - -n           | thing goods small portable instrument
piano         | das Klavier -s -e          | thing goods instrument
violin        | die Geige - -n             | thing goods small portable instrument
flute         | die Flöte - -n             | thing goods small portable instrument
ladder        | die Leiter - -n            | thing goods
blanket       | die Decke - -n             | thing goods small portable
coat          | der Mantel -s Mäntel       | thing goods small portable clothes of:person
dress         | das Kleid -es -er          | thing goods small portable clothes
shirt         | das Hemd -es -en           | thing goods small portable clothes
hat           | der Hut -es Hüte           | thing goods small portable clothes of:person
shoe          | der Schuh -s -e            | thing goods small portable clothes
skirt         | der Rock -es Röcke         | thing goods small portable clothes
jacket        | die Jacke - -n             | thing goods small portable clothes of:person
tree          | der Baum -es Bäume         | plant burning
flower        | die Blume - -n             | plant goods blooming
rose          | die Rose - -n              | plant goods blooming
"""

FOODS = """
apple         | der Apfel -s Äpfel         | food goods fruit
pear          | die Birne - -n             | food goods fruit
egg           | das Ei -s -er              | food goods cooked
cake          | der Kuchen -s -            | food goods baked
potato potatoes | die Kartoffel - -n       | food goods cooked
carrot        | die Karotte - -n           | food goods cooked
tomato tomatoes | die Tomate - -n          | food goods fruit
soup          | die Suppe - -n             | food cooked
salad         | der Salat -es -e           | food
sausage       | die Wurst - Würste         | food goods cooked
cherry        | die Kirsche - -n           | food goods fruit
strawberry    | die Erdbeere - -n          | food goods fruit
biscuit       | der Keks -es -e            | food goods baked
lemon         | die Zitrone - -n           | food goods fruit
bread         | das Brot -es .             | food goods baked
cheese        | der Käse -s .              | food goods
meat          | das Fleisch -es .          | food goods cooked
rice          | der Reis -es .             | food goods cooked
chocolate     | die Schokolade - .         | food goods
water         | das Wasser -s .            | drink
milk          | die Milch - .              | drink goods
coffee        | der Kaffee -s .            | drink goods
tea           | der Tee -s .               | drink goods
wine          | der Wein -s .              | drink goods
beer          | das Bier -s .              | drink goods
juice         | der Saft -es .             | drink goods
"""

IDEAS = """
song          | das Lied -es -er           | idea song
question      | die Frage - -n             | idea puzzle
problem       | das Problem -s -e          | idea puzzle of:person
idea          | die Idee - -n              | idea thought of:person
plan          | der Plan -s Pläne          | idea thought of:person
secret        | das Geheimnis Geheimnisses Geheimnisse | idea thought of:person
word          | das Wort -es Wörter        | idea puzzle
language      | die Sprache - -n           | idea puzzle tongue
film          | der Film -s -e             | idea event show
concert       | das Konzert -s -e          | idea event show
lecture       | die Vorlesung - -en        | idea event
wedding       | die Hochzeit - -en         | idea event of:kin
exam          | die Prüfung - -en          | idea event
meeting       | die Sitzung - -en          | idea event
rain          | der Regen -s .             | weather
storm         | der Sturm -es Stürme       | weather
noise         | der Lärm -s .              | weather
heat          | die Hitze - .              | weather
"""

MEN = "Peter Paul Jonas Felix Lukas Max David Simon Karl Thomas"
WOMEN = "Anna Maria Lena Clara Emma Sophie Laura Eva Julia Martha"
